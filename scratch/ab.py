import sys, json, os, torch, statistics
import mtagen
from mtagen.planner.strip import passes
import triton.testing as tt
ours = passes.contractions
def build(kw, on):
    passes.contractions = ours if on else (lambda *a: ())
    for f in vars(passes).values(): pass
    return mtagen.build(**kw)
M=dict(kernel=None,mixed_heads=16,post_mixed_heads=16); E=dict(kernel=(6,11),mixed_heads=16,post_kernel=(6,11),post_mixed_heads=16)
CASES=[("mixing",M,4,2048,64),("mixing",M,1,8192,64),("mixing",M,1,8192,128),("everything",E,4,2048,64),("everything",E,1,8192,64),("everything",E,1,8192,128),("mixing",M,2,512,64),("everything",E,2,512,64),("conv after",dict(kernel=None,post_kernel=(6,11)),1,8192,128)]
res=[]
for name,kw,B,N,D in CASES:
    row=[]
    outs={}
    for on in (0,1):
        op=build(dict(kw,head_dim=D,backend="cuda",dtype="bf16"),on)
        torch.manual_seed(0)
        q,k,v=(torch.randn(B,16,N,D,device="cuda",dtype=torch.bfloat16,requires_grad=True) for _ in range(3))
        w={n:(x+0.05*torch.randn_like(x)).requires_grad_() for n,x in op.identity_weights(16,device="cuda").items()}
        go=torch.randn(B,16,N,D,device="cuda",dtype=torch.bfloat16)
        leaves=[q,k,v,*w.values()]
        out=op(q,k,v,**w)
        g=torch.autograd.grad(out,leaves,go,retain_graph=True)
        outs[on]=[out,*g]
        f=tt.do_bench(lambda: op(q.detach(),k.detach(),v.detach(),**{n:x.detach() for n,x in w.items()}),return_mode="median")
        b=tt.do_bench(lambda: torch.autograd.grad(out,leaves,go,retain_graph=True),return_mode="median")
        row+= [f,b]
    err=[((x.float()-y.float()).norm()/y.float().norm()).item() for x,y in zip(outs[1],outs[0])]
    print(name,B,N,D,"fwd %.3f -> %.3f  bwd %.3f -> %.3f"%(row[0],row[2],row[1],row[3]),"diff %.1e"%max(err),[f"{e:.0e}" for e in err],flush=True)
