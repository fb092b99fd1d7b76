"""All that raypar uses of Ray beyond its public API, each use behind a fence (`fences/private_api_fence.py`)."""

TESTED = "2.60"
"""The release of Ray with which every fence is tested."""
