"""A folder that a shim puts first on a Python rank's path; see `sitecustomize`."""
