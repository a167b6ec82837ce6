"""An example of a package that adds to aiakq; pyproject.toml names its entry points. docs/adding.md describes them."""
