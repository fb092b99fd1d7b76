"""How raypar calls the user's code: which errors are caught, and what their tracebacks show."""
