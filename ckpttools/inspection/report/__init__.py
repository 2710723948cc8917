"""HTML reports: the data (`contents`) and the page around it (`page`)."""
