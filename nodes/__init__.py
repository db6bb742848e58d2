"""The nodes that ship with the studio, one module per kind."""
