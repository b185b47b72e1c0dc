"""An Ascend device made of host memory, for tests: the real torch_npu runs over an emulated AscendCL.

``native/`` is compiled by :mod:`.build` (streams, graphs, memory; a layer over torch_npu's kernels). :mod:`.activate`
switches the layer on after torch_npu is imported; ``site/sitecustomize.py`` calls it in every process of a test bed.
Shows: that the Python and C++ above AscendCL do what they should with streams, graphs, memory and documented operator
rules. Does not show: speed, kernel numerics, tiling limits, private formats beside FRACTAL_NZ of matrices. Nothing here
has run on hardware.
"""
