"""Host memory, threads, processes and processor topology, without torch."""
