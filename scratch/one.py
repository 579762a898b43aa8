import sys, torch, mtagen, os
D,N,B=(int(x) for x in sys.argv[1:4])
op=mtagen.build(kernel=None,mixed_heads=16,post_mixed_heads=16,head_dim=D,backend="cuda",dtype="bf16")
q,k,v=(torch.randn(B,16,N,D,device="cuda",dtype=torch.bfloat16,requires_grad=True) for _ in range(3))
w=op.identity_weights(16,device="cuda")
out=op(q,k,v,**w); g=torch.randn_like(out)
torch.cuda.synchronize(); torch.cuda.profiler.start(); out.backward(g); torch.cuda.synchronize(); torch.cuda.profiler.stop()
