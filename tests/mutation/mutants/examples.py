"""Programs that train: what is left of a run that is stopped."""

from __future__ import annotations

from ..mutant import Mutant

RUNS, FIND_BLOCK, GPT = "examples/runs.py", "examples/find_block/train.py", "examples/gpt/train.py"
DISTRIBUTED = "examples/gpt/train_distributed.py"
TESTS, TESTS_DISTRIBUTED = "tests/test_runs.py", "tests/test_gpt_distributed.py"
KILLED = f"{TESTS}::test_a_kill_at_any_moment_leaves_a_run_to_resume[gpt]"

MUTANTS = (
    Mutant(
        "examples-checkpoint-in-place",
        RUNS,
        "path.with_name(path.name + UNFINISHED)",
        "path",
        "A kill while a checkpoint is written leaves no checkpoint.",
        (KILLED,),
    ),
    Mutant(
        "examples-log-in-place",
        RUNS,
        "publish(self.path, lambda file: file.writelines(map(_line, kept)))",
        'self.path.write_bytes(b"".join(map(_line, kept)))',
        "A kill while a resumed run drops entries leaves no log.",
        (f"{TESTS}::test_a_log_is_cut_beside_its_place",),
    ),
    Mutant(
        "examples-rename-before-the-content",
        RUNS,
        "file.flush()\n            os.fsync(file.fileno())",
        "pass",
        "A machine that loses its power has a checkpoint's name without its content.",
        (f"{TESTS}::test_a_file_that_cannot_be_written_leaves_the_one_before",),
    ),
    Mutant(
        "examples-checkpoint-executes",
        RUNS,
        "weights_only=True",
        "weights_only=False",
        "A checkpoint from elsewhere executes what it says.",
        (f"{TESTS}::test_nothing_in_a_checkpoint_is_executed",),
    ),
    Mutant(
        "examples-checkpoint-altered",
        RUNS,
        "if damaged := archive.testzip():",
        'if damaged := "":',
        "A run goes on with altered weights.",
        (f"{TESTS}::test_a_damaged_checkpoint_is_named",),
    ),
    Mutant(
        "examples-log-without-a-checkpoint",
        RUNS,
        "if self.path.exists() and not checkpoint:",
        "if False:",
        "A run that begins anew empties another run's log.",
        (f"{TESTS}::test_a_log_without_a_checkpoint_is_not_touched",),
    ),
    Mutant(
        "examples-torn-line-refused",
        RUNS,
        "            except InputError:\n",
        "            except KeyError:\n",
        "A kill while a line is logged leaves a run that cannot be resumed.",
        (f"{TESTS}::test_a_torn_last_line_is_left_out",),
    ),
    Mutant(
        "examples-no-checkpoint-of-a-short-run",
        RUNS,
        "max(1, min(1000, steps // 10))",
        "1000",
        "A run of 300 steps that is killed loses all of them.",
        (f"{TESTS}::test_default_interval", f"{TESTS}::test_steps_that_are_saved"),
    ),
    Mutant(
        "examples-ctrl-c-in-workers",
        FIND_BLOCK,
        "            worker_init_fn=ignore_interrupts,\n",
        "",
        "Ctrl-C reaches the processes that draw samples, on which the step waits.",
        (f"{TESTS}::test_ctrl_c_in_a_terminal",),
    ),
    Mutant(
        "examples-losses-before-ctrl-c",
        FIND_BLOCK,
        "torch.stack(self.losses).cpu() if self.losses else torch.empty(0)",
        "torch.empty(0)",
        "A resumed run logs the mean loss of a part of the steps.",
        (f"{TESTS}::test_ctrl_c_saves_the_step",),
    ),
    Mutant(
        "examples-ctrl-c-not-saved",
        GPT,
        "saved = self.save()",
        "saved = self.saved or self.folder",
        "Ctrl-C loses the steps since the last checkpoint.",
        (f"{TESTS}::test_ctrl_c_saves_the_step[gpt]",),
    ),
    Mutant(
        "examples-finished-run-unsaid",
        GPT,
        "if self.step >= until:",
        "if self.step > until:",
        "A finished run shows a bar of no steps and a loss that is no number.",
        (f"{TESTS}::test_a_finished_run_says_so",),
    ),
    Mutant(
        "examples-checkpoint-saved-twice",
        GPT,
        "if self.saved is None:",
        "if True:",
        "The only checkpoint is written again.",
        (f"{TESTS_DISTRIBUTED}::test_checkpoints_are_written_beside_and_once",),
    ),
    Mutant(
        "examples-settings-read-into",
        GPT,
        "dict(self.identity)",
        "self.identity",
        "A distributed run with other settings resumes as if they were the same.",
        (f"{TESTS_DISTRIBUTED}::test_damaged_checkpoints_are_named",),
    ),
    Mutant(
        "examples-newest-checkpoint-pruned",
        DISTRIBUTED,
        "path != checkpoint and path.name",
        "path.name",
        "A run has no checkpoint.",
        (f"{TESTS_DISTRIBUTED}::test_checkpoints_are_written_beside_and_once",),
    ),
    Mutant(
        "examples-pruned-before-the-rename",
        DISTRIBUTED,
        "            remove(checkpoint)  #",
        "            [remove(each) for each in checkpoint.parent.iterdir() if each != unfinished]  #",
        "A kill between two checkpoints leaves none.",
        (f"{TESTS_DISTRIBUTED}::test_checkpoints_are_written_beside_and_once",),
    ),
    Mutant(
        "examples-checkpoint-half-removed",
        DISTRIBUTED,
        "(checkpoint / METADATA).unlink(missing_ok=True)",
        "pass",
        "A kill while a checkpoint is removed leaves one that seems complete.",
        (f"{TESTS_DISTRIBUTED}::test_a_checkpoint_that_is_being_removed_is_not_complete",),
    ),
    Mutant(
        "examples-ctrl-c-of-one-rank",
        DISTRIBUTED,
        "dist.all_reduce(asked, dist.ReduceOp.MAX)",
        "dist.all_reduce(asked, dist.ReduceOp.MIN)",
        "Ctrl-C that reaches one rank stops none, or ranks stop after different steps.",
        (f"{TESTS_DISTRIBUTED}::test_ctrl_c_saves_the_step",),
    ),
)
