"""Parallelism: the only folder of megatron_ext that talks to process groups.

`layout` sets up the groups of a run, and `rendezvous` the store through which its ranks find each other. `collectives`
holds every collective and counts its bytes. Tensor parallelism: `tensor`. Context parallelism: `slices` cuts sequences,
`halo` brings the keys and values of a window, `cells` those of FreeSolo's candidate cells, `queries` deals out the
queries of attention to everything. What other files call takes a group, None for one rank.
"""
