"""The report of an analysis: figures from its tables, and one page that opens offline."""
