"""The layer graph of what the user's model function returned: layers that it names, or a module that is cut into layers."""
