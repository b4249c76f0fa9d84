"""A finished or unfinished run as one HTML page: what it left is read, compared with its plan, drawn and told."""
