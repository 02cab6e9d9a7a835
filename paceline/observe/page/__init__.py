"""A report on runs as a page of HTML with drawings in SVG, in one file that needs no network."""
