"""The example jobs that come with raypar, for `raypar example`, also where raypar was installed from a wheel."""
