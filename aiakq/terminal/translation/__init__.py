"""Command lines of other servers, translated to ``aiakq serve``: one table per program."""
