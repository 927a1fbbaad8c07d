"""Former name of package_data.py, by which batch scripts of version 0.1 call it; a queued job keeps its script."""

import runpy

if __name__ == "__main__":
    runpy.run_module("dist_transformer.package_data", run_name="__main__")
