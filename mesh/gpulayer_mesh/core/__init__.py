"""Pure decisions: no event loop, sockets, clock, environment, files, threads or logging here."""
