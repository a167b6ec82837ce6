"""Self-contained HTML reports: one style, jinja2 templates, and charts as inline SVG. No scripts, nothing is loaded."""
