#!/usr/bin/env python
"""tmp"""
import sys, time
from pathlib import Path
import torch
sys.path.insert(0, str(Path(__file__).parent))
from draft_training import labels as L, text as T, target as G
tp, txt, work, shard = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
convs = T.read_conversations(txt)
model = G.load_target(tp)
V = model.config.vocab_size
T.check_ids(convs, V)
s = T.split(convs, seed=0, held_out=150, chunk=64)
plan = L.LabelPlan(target_sha256=L.file_sha256(tp), text_sha256=L.file_sha256(txt), seed=0, held_out=150, chunk=64, draft_vocab=6144)
plan.claim(work)
voc = T.draft_vocabulary((r for c in s.chunks for r in c), vocab=V, size=6144, always=G.special_ids(model))
ho = [r for r in s.held_out]
import numpy as np
cov = np.concatenate([r.ids[r.prompt_tokens:] for r in ho]); print("coverage", np.isin(cov, voc).mean(), len(cov), sorted(set(G.special_ids(model))), flush=True)
t0 = time.time()
L.label(model, s.chunks, s.held_out, voc, work=work, shard=(shard, 2), progress=lambda d, n: print(f"{time.time()-t0:.0f}s {d}/{n}", flush=True))
