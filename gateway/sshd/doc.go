// Package sshd is an SSH server whose users are sandboxes: "ssh ID@host" is a
// shell in one.
//
// There are no passwords and no authorized keys. A user's key carries a
// certificate of this server's own [LoginCA], made through the API for one
// sandbox and a few minutes, so that the rights of SSH are those of the API at
// that time and nothing has to be revoked.
//
// Shell, exec and sftp are processes of the sandbox, started as the API starts
// them: they run as the image's user and may do what that may. sftp is a program
// that the guest brings, since few images have one. Forwarded connections end at
// ports of the sandbox, whatever host the client names.
package sshd
