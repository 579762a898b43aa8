import sys
from mtagen.spec import Spec
from mtagen.codegen import cuda
from mtagen.planner.strip.contractions import contractions
from mtagen.runtime.nvrtc import compile_cubin
from mtagen.runtime.offline import usage_of_cubins
for kw in (dict(kernel=(6,11),head_dim=64,mixed_heads=16,post_kernel=(6,11),post_mixed_heads=16),dict(kernel=None,head_dim=128,mixed_heads=16,post_mixed_heads=16),dict(kernel=None,head_dim=256,mixed_heads=16,post_mixed_heads=16)):
    spec=Spec(**kw)
    for name in ("forward","backward"):
        for s in contractions(name,spec,"sm_90a"):
            cubin=compile_cubin(cuda.render(s) if hasattr(cuda,"render") else None,"sm_90a",s.name)
            u=usage_of_cubins(cubin)
            for k,v in u.items(): print(kw["head_dim"],s.role,v.registers,v.stack,s.tiles,s.shared.size,s.kernel.threads,s.ctas,s.kernel.registers)
