"""The documentation site: its configuration (`conf.py`), and the pages that are made from the code: `make site`."""
