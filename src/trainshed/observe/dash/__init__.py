"""`trainshed dash` and `report.html`: the runs of a store as a web page, read-only.

run_reader.py   follows the events of one run and keeps what the views need
curves.py       figures over steps: columns that grow, drawn with a few points however many there are
views.py        each view of a run as JSON; the server answers with it, the report holds it
access.py       who may ask: Host, Origin and token, and the headers of every answer
server.py       the web server (extra `dash`)
report.py       the same page and its data in one file
pages/          the page itself; uplot/ is https://github.com/leeoniya/uPlot 1.6.32 with its licence
"""
