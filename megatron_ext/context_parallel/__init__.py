"""Context parallelism: the only folder that calls a collective.

`collectives` holds every collective and counts its bytes, `sequence` cuts sequences into slices,
`halo` brings the keys and values of a window, `cells` those of FreeSolo's candidate cells,
`queries` deals out the queries of attention to everything, `layout` sets up the groups.
"""
