"""A report as one HTML page: what it shows (`contents`) and the page around it (`page`)."""
