"""All that raypar uses of PyTorch beyond its public API, each use behind a fence (`fences/private_api_fence.py`)."""

TESTED = "2.13"
"""The release of PyTorch with which every fence is tested."""
