"""From a derived program to what one device issues: groups, buckets, fused kernels, collectives."""
