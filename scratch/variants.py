import sys, torch, mtagen, os, collections
from torch.profiler import profile, ProfilerActivity
from mtagen.planner.strip import contractions as C, passes
ours=passes.contractions
def once(D,N,B,label,W=8,on=True,wait=False,noy=False):
    C.WARPS=W; C.BLOCK=16*W; C.ContractionKernel.exp_wait=wait; C.ContractionKernel.exp_noy=noy
    passes.contractions = ours if on else (lambda *a: ())
    op=mtagen.build(kernel=None,mixed_heads=16,post_mixed_heads=16,head_dim=D,backend="cuda",dtype="bf16")
    torch.manual_seed(0)
    q,k,v=(torch.randn(B,16,N,D,device="cuda",dtype=torch.bfloat16,requires_grad=True) for _ in range(3))
    w=op.identity_weights(16,device="cuda")
    out=op(q,k,v,**w); go=torch.randn_like(out)
    for _ in range(3): torch.autograd.grad(out,[q,k,v],go,retain_graph=True)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(5): torch.autograd.grad(out,[q,k,v],go,retain_graph=True)
        torch.cuda.synchronize()
    tot=collections.Counter()
    for e in p.events():
        if e.device_type==torch.autograd.DeviceType.CUDA:
            n=e.name
            key=next((r for r in ("grad_values","grad_queries","grad_keys","grad_scores","delta","gradient_sums","nvjet") if r in n),"other")
            if key=="nvjet": key="nvjet "+n[-4:]
            tot[key]+=e.time_range.elapsed_us()/5
    print(D,N,B,label,{k:round(v) for k,v in tot.items()},"total",round(sum(tot.values())),flush=True)
for D,N,B in ((128,8192,1),(64,2048,4),(64,8192,1)):
    once(D,N,B,"cublas",on=False)
    once(D,N,B,"ours")
