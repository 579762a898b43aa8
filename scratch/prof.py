import sys, json, os, collections, torch
from torch.profiler import profile, ProfilerActivity
from examples.gpt.throughput import *
from examples.gpt.model import SIZES
out=os.environ["OUT"]
dev=torch.device("cuda")
size=SIZES["300M"]
for contender in ("plain-compiled","mta-compiled"):
    torch.compiler.reset(); gc.collect(); torch.cuda.empty_cache(); torch.manual_seed(0)
    with dev: model=make_decoder(size, contender.removesuffix("-compiled"), LLAMA3_VOCABULARY)
    step=make_step(model,4,2048,LLAMA3_VOCABULARY,True)
    for _ in range(4): step()
    torch.cuda.synchronize()
    print(contender, sorted(time_steps(step,10,dev)))
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as p:
        for _ in range(2): step()
        torch.cuda.synchronize()
    rows=[]
    tot=collections.Counter(); n=collections.Counter()
    evs=[]
    for e in p.events():
        if e.device_type==torch.autograd.DeviceType.CUDA:
            tot[e.name]+=e.time_range.elapsed_us(); n[e.name]+=1
            evs.append((e.time_range.start,e.time_range.end,e.name))
    evs.sort()
    busy=0; last=0
    for s,t,_ in evs:
        if t>last: busy+=t-max(s,last); last=t
    with open(f"{out}/{contender}.txt","w") as f:
        print("total ms a step", sum(tot.values())/2e3, "busy", busy/2e3, file=f)
        for k,v in tot.most_common(): print(f"{v/2e3:8.3f} {n[k]/2:7.1f} {v/n[k]:8.1f} {k[:200]}", file=f)
    json.dump([(round(s,1),round(t-s,1),k[:120]) for s,t,k in evs[len(evs)//2:]], open(f"{out}/{contender}.events.json","w"))
    del model, step
