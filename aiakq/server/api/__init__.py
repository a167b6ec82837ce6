"""The API: routes, request and response models, and the requests that are running."""
