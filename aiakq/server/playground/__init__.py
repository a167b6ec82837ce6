"""The playground: a page at / that sends requests to this server and to others."""
