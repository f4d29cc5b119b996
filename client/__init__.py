"""What lives outside the server process: the client library and the `muxk` command."""
