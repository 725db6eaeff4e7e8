"""The functions of `import shardwise as sw`: as the verbs of the command line, for names and paths as well as for values.

A *model* is a name of the catalogue, the path of a Hugging Face `config.json` or of its folder, or an `Architecture`. A *cluster*
is CHIP:COUNT or CHIP:SHAPE, the path of a `.toml` file, or a `Cluster`; with a name, `stack` is the software stack to predict.
A *job* is a `Job`, or its fields as keywords, whose numbers may be written as "4Mi". A *layout* is a `Layout` or its text.
"""
