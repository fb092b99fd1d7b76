"""One module per subcommand of `raypar`: `add_arguments(parser)` and `run(args) -> exit code`."""
