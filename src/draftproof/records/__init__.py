"""The file formats through which stages meet: rows, mapping, hidden-state store."""
