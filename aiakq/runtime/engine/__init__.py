"""The engine: scheduler, sequences and KV pages as a state machine, without torch, clock or sockets."""
