"""A run on one page: numbers, pictures and a sample of text (`report.write_report`)."""
