"""The books' closed forms, as explanations beside a derived estimate: nothing is planned with them.

Letters as in the books, each with the parameters that it is: B tokens of a global batch (global_batch_tokens, batch); T tokens
of a sequence, of a micro-batch or of a device (tokens, seq_len, tokens_per_device); D model width (d_model, d_in); F hidden
width (d_ff, d_out); f F/D (ff_ratio); V vocabulary (vocab_size); L layers (num_layers); P parameters (num_params); N chips, or
query heads (num_chips, num_heads); K key-value heads (num_kv_heads); H width of a head (head_dim); M axes of the torus
(num_axes); Mx axes of it for fsdp (fsdp_axes); My axes of it for tp (tp_axes); X degree of fsdp (fsdp); Y degree of tp (tp); n
devices of one collective (degree, cp, dp); p pipeline stages (pp); m micro-batches (num_micro_batches); v virtual stages of a
rank (num_virtual_stages); e bytes of an element (bytes_per_element); G query heads of a key-value head (queries_per_kv_head); A
arrays (num_arrays); C FLOP/s of a chip (flops_per_s); W bytes/s of one axis in both directions, or of a memory (bytes_per_s);
alpha C / W (alpha); t seconds (seconds).

Both books take an ungated MLP (two matrices) of bf16 for their bounds on communication.

Sources: "the book" is Austin et al., How to Scale Your Model, 2025; "the note" is Stratos, Compute-Bound Training,
2026; "the playbook" is Tazi et al., The Ultra-Scale Playbook, 2025.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
