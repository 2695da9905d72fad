// Package xgb reads XGBoost models and evaluates them: bytes in, margins out.
//
// It owns the loader for the JSON and UBJSON that XGBoost's save_model writes
// (1.x to 3.x), the evaluator, and the model that is shipped in the binary. It
// is pure: no file, clock, log or goroutine; whoever calls it reads the file and
// decides what a refusal means.
//
// What is accepted: boosters gbtree and dart, objectives binary:logistic and
// binary:logitraw, one output, numeric splits, up to [MaxFeatures] features, up
// to [MaxTrees] trees of depth up to [MaxDepth]. Everything else is refused with
// what was found and what is accepted; nothing is guessed, since a model that is
// nearly understood gives plausible wrong numbers.
//
// A model file is untrusted input. Invariants:
//   - Load never panics and never loops; its memory is bounded by the size of the
//     input and the limits above, whatever counts the input declares;
//   - every node of an accepted tree is reached exactly once from the root, and
//     every threshold and leaf that is used is a finite float32;
//   - a loaded model is immutable and safe for concurrent use;
//   - Margin has the bits that XGBoost's predict(output_margin=True) has, for the
//     library version that wrote the file. testdata/golden.py makes the evidence
//     with the real libraries. One limit: the intercept of binary:logistic is a
//     logarithm that XGBoost takes from the C library. Ours is rounded correctly;
//     glibc's logf is not for one in 200 base scores, and then all margins of
//     that model may differ in their last bit.
package xgb
