"""The data tests read no network: what `datasets` would ask the Hub for fails at once."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
