"""The command line, one thin file a verb. Only this room prints: data on stdout, talk on stderr."""
