"""The engine: scheduler, sequences and pages as a pure state machine, without torch, clock or sockets."""
