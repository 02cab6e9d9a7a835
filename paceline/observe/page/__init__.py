"""The report on runs as a page of HTML, with drawings in SVG: one file that needs no network."""
