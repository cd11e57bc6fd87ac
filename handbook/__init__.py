"""The documentation site: its configuration (`conf.py`), and pages generated from the code: `make site`."""
