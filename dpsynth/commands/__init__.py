"""One file a subcommand: parse, call the library, print."""
