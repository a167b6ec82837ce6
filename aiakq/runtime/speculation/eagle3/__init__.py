"""EAGLE-3: a head of one layer that reads hidden states of the target model."""
