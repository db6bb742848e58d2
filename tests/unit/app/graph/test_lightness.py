import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]


def test_importing_the_sdk_loads_no_heavy_library_and_no_other_room():
    code = (
        "import sys, app.graph; "
        "print(sorted(m for m in sys.modules if m.split('.')[0] in "
        "('torch', 'numpy', 'jagg', 'nodes', 'yaml', 'gradio') "
        "or (m.startswith('app.') and not m.startswith('app.graph'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
