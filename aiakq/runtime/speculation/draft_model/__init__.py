"""The method draft_model: a second model that proposes draft tokens."""
