"""JAGG: group-relative policy optimisation of flow-matching models with aggregated backward passes.

The package depends on torch and safetensors alone and can be used without the studio.
"""
