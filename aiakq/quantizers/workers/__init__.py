"""Workers: processes that quantize one model together (``--workers``)."""
