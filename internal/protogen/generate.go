package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/bufbuild/protocompile"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/pluginpb"
)

// plugins are run in this order; each is a tool of go.mod.
var plugins = []string{"protoc-gen-go", "protoc-gen-go-grpc"}

// Generate writes the Go code of one .proto file into out, or beside the file
// where out is empty. The file is registered under its path from the module's
// root, which no other file of the program can have.
func Generate(file, out string) error {
	if out == "" {
		out = filepath.Dir(file)
	}
	root, name, err := fromModule(file)
	if err != nil {
		return err
	}
	request, err := compile(root, name)
	if err != nil {
		return fmt.Errorf("compile %s: %w", file, err)
	}
	for _, plugin := range plugins {
		response, err := run(plugin, request)
		if err != nil {
			return fmt.Errorf("run %s: %w", plugin, err)
		}
		for _, f := range response.File {
			if err := os.WriteFile(filepath.Join(out, filepath.Base(f.GetName())), []byte(f.GetContent()), 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}

// fromModule splits a path into its module's folder and the rest.
func fromModule(file string) (root, name string, err error) {
	path, err := filepath.Abs(file)
	if err != nil {
		return "", "", err
	}
	for root = filepath.Dir(path); ; root = filepath.Dir(root) {
		if _, err := os.Stat(filepath.Join(root, "go.mod")); err == nil {
			break
		}
		if root == filepath.Dir(root) {
			return "", "", fmt.Errorf("%s lies in no Go module", file)
		}
	}
	name, err = filepath.Rel(root, path)
	return root, filepath.ToSlash(name), err
}

// compile returns what protoc would send to a plugin: the file and everything
// it imports, imports first.
func compile(root, name string) (*pluginpb.CodeGeneratorRequest, error) {
	compiler := protocompile.Compiler{
		Resolver:       protocompile.WithStandardImports(&protocompile.SourceResolver{ImportPaths: []string{root}}),
		SourceInfoMode: protocompile.SourceInfoStandard,
	}
	files, err := compiler.Compile(context.Background(), name)
	if err != nil {
		return nil, err
	}
	request := &pluginpb.CodeGeneratorRequest{
		FileToGenerate: []string{name},
		Parameter:      proto.String("paths=source_relative"),
	}
	addFile(request, files[0], map[string]bool{})
	return request, nil
}

func addFile(request *pluginpb.CodeGeneratorRequest, file protoreflect.FileDescriptor, seen map[string]bool) {
	if seen[file.Path()] {
		return
	}
	seen[file.Path()] = true
	for i := range file.Imports().Len() {
		addFile(request, file.Imports().Get(i).FileDescriptor, seen)
	}
	request.ProtoFile = append(request.ProtoFile, descriptorOf(file))
}

func descriptorOf(file protoreflect.FileDescriptor) *descriptorpb.FileDescriptorProto {
	// The compiler's own message keeps what a round trip through descriptors
	// loses: comments' places.
	if f, ok := file.(interface {
		FileDescriptorProto() *descriptorpb.FileDescriptorProto
	}); ok {
		return f.FileDescriptorProto()
	}
	return protodesc.ToFileDescriptorProto(file)
}

func run(plugin string, request *pluginpb.CodeGeneratorRequest) (*pluginpb.CodeGeneratorResponse, error) {
	in, err := proto.Marshal(request)
	if err != nil {
		return nil, err
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.Command("go", "tool", plugin)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(in), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%w: %s", err, stderr.Bytes())
	}
	var response pluginpb.CodeGeneratorResponse
	if err := proto.Unmarshal(stdout.Bytes(), &response); err != nil {
		return nil, err
	}
	if response.Error != nil {
		return nil, fmt.Errorf("%s", response.GetError())
	}
	return &response, nil
}
