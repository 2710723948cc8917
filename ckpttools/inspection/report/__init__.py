"""Reports as HTML: the data (`contents`) and the page around it (`page`)."""
