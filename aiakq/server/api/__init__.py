"""The API: routes, request and response models, and request handling."""
