"""Models of packages that raypar does not know, small, with a batch each: `jobs/bench/capture.py --package` tries them."""
